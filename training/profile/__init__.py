"""Where a step's time goes: traces of chosen ranks and iterations, memory snapshots, a measured timeline.

Off, nothing of it is installed. docs/profiling.md says how to use it.

    callback         when a trace begins and ends, and on which ranks; by torch.profiler or nsys
    memory_snapshot  a GPU's allocations, also when memory runs out
    timeline         a measured step every so many iterations; spans adds up
    ranges           what a step is made of, while something listens; range_names, waits
    files            what RUN_DIR/profile holds
    summary_job      the process that summarises a trace; summarize is its program
    summary          what took the time of a trace, for tools.report; chrome_trace reads it, intervals adds up
"""
