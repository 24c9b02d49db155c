"""Everything that the laboratory adds to fedrot's registries, by ``import
reproductions.plugins``.
"""

import reproductions.kinds
import reproductions.optimal_transport  # noqa: F401
