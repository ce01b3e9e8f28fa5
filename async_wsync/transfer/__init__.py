"""Tensors as bytes: buckets planned, laid out, packed, unpacked and compared. Knows no Ray, no loop, no engine."""
