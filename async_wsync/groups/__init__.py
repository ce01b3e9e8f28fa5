"""Update groups: the `torch.distributed` groups over which weights travel. They know no Ray and no engine."""
