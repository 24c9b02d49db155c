"""Reports: pages of run folders and of a strategy's rows, tables as Markdown, results on a terminal."""
