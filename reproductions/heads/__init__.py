"""Task heads under label skew: closed forms, rivals and fedrot's fitted heads on one
pretrained encoder.
"""
