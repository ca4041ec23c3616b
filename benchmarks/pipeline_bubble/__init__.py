"""How long ranks of a pipeline are idle, by schedule, beside what the schedule's formula says."""
