"""The kinds of lines that a run leaves in its folder. docs/reference/recording.md has their fields; a test compares."""

from __future__ import annotations

KINDS = {
    # recording/every-*.jsonl
    "step": "one step on one worker",
    "pause": "what a worker did between two loops",
    "metrics": "the averages of what was logged in one step",
    # events.jsonl of the process that supervises the run
    "command": "what runs here, and how it is supervised",
    "begin": "the workers are about to be started",
    "continue": "a head continues a run that another head has supervised",
    "started": "processes of workers are being started",
    "not started": "workers could not be started",
    "event": "something has happened to a worker, and what was decided",
    "exited": "the process of a worker has ended",
    "stopped": "a worker that was stopped by SIGSTOP continues",
    "saved": "a checkpoint was saved",
    "verdict": "which worker slows the run down, whenever that changes",
    "signal": "the process got a signal that ends the run",
    "stop requested": "`lockstep stop` was called",
    "unknown packet": "a worker has sent something that makes no sense",
    "zygote hung": "the process that forks the workers was killed because it hung",
    "end": "the run has ended",
    "summary": "what the run has come to, in sentences",
    # events.jsonl of a head
    "registered": "the agent of a machine has connected",
    "let go": "an agent was told to look for another head",
    "refused": "a connection was refused",
    "machine lost": "the connection to a machine was lost",
    # events.jsonl of an agent
    "head lost": "the connection to the head was lost",
    "leaving": "this machine leaves the run",
    "the run has ended": "the head has said so",
}
