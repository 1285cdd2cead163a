"""Share of effective training time of a job: times, closed form, simulation."""
