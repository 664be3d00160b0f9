"""Starts, watches and ends workers: `lockstep run`. No torch outside the zygote."""
