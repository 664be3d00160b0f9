"""From autograd to averaged gradients."""
