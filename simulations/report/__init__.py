"""Reports: the page of a run folder and of a strategy's rows, tables as Markdown, results on a terminal."""
