"""Task heads from sums with noise, under differential privacy.

Each site clips its rows by public numbers and adds noise to its own sums, so that the
server need not be trusted: what sums tell about a row is bounded by the site's epsilon.
The server fits a task head with the covariance of public rows.
"""
