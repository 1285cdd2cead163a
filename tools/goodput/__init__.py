"""Expected share of effective training time of a job, from how often it fails and how long each part of a fault takes.

model       the times, and the share in closed form
simulation  the same, failure by failure

"""
