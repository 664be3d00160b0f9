"""What a training step costs on GPUs: the bare loop, torch DDP and Lockstep, eager and captured, interleaved in one process.

    python -m benchmarks.gpu                      everything, within four minutes
    python -m benchmarks.gpu --ranks 1 --cases gpt-large,cnn --seconds 60
    python -m benchmarks.gpu --cpu-check          the same code with tiny models on the CPU: does it run at all?

__main__.py has the options, supervisor.py starts the ranks, worker.py is one rank, variants.py and models.py are what is measured,
measuring.py is how, and goals.py and tables.py make of it what a person reads.
"""
