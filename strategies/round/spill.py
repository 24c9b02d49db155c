"""Tensors that have to wait for others: in memory, or in files that are mapped into it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch import Tensor

from fedrot.errors import FedrotError

#: Returns tensors that were stored.
Stored = Callable[[], dict[str, Tensor]]


class Store:
    """Keeps tensors until the ``with`` block ends.

    Args:
        folder: where safetensors files are kept meanwhile, in a folder of their own that is removed
            afterwards; None keeps the tensors in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else None
        self._open = ExitStack()
        self._own: Path | None = None
        self._count = 0

    def __enter__(self) -> Store:
        """Make the folder.

        Raises:
            FedrotError: it cannot be made or written to.
        """
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                temporary = tempfile.TemporaryDirectory(prefix="fedrot-", dir=self.folder)
            except OSError as error:
                raise FedrotError(f"The folder '{self.folder}' cannot be written to: {error}") from error
            self._own = Path(self._open.enter_context(temporary))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def put(self, tensors: Mapping[str, Tensor]) -> Stored:
        """Store tensors, and return what gives them back: as they are, or mapped from their file.

        Raises:
            FedrotError: the file cannot be written.
        """
        if self._own is None:
            kept = dict(tensors)
            return lambda: kept
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        # A file holds no views and no two tensors that share memory: of equal arrays Flower makes one.
        keys = {id(tensor): str(index) for index, tensor in enumerate(tensors.values())}
        unique, taken = dict[str, Tensor](), set[int]()
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            value = tensor.cpu().contiguous()
            memory = value.untyped_storage().data_ptr()
            unique[keys[id(tensor)]] = value.clone() if memory in taken else value
            taken.add(memory)
        path = self._own / f"{self._count}.safetensors"
        self._count += 1
        try:
            save_file(unique, path)
        except (OSError, SafetensorError) as error:
            raise FedrotError(f"What waits cannot be kept in '{self._own.parent}': {error}") from error
        names = {name: keys[id(tensor)] for name, tensor in tensors.items()}
        return lambda: _mapped(path, names)


def _mapped(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in dict.fromkeys(names.values())}
    return {name: tensors[key] for name, key in names.items()}
