"""From autograd's hooks to averaged gradients: hooks, reducers, buckets, partial sums, and the engine of Run."""
