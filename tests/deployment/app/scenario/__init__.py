"""An app whose final model can be computed by hand."""
