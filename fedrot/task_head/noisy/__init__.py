"""Task heads from sums with noise, under differential privacy.

Each site clips its rows by public numbers and adds noise to its own sums, so that
nobody has to be trusted: whoever sees the sums learns little about any single row. The
server fits a task head with the covariance of public rows.
"""
