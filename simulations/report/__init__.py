"""Reports: pages of run folders and of a strategy's rows, and results on a terminal."""
