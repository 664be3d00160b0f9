"""`lockstep run`: starts, supervises and stops the workers of one machine. Only the zygote and the workers import torch."""
