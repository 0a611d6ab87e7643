"""What the kernels for NVIDIA Hopper share: warpgroups in roles, rings of tiles in shared memory, softmax, and its schedule."""
