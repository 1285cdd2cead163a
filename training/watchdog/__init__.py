"""What is wrong with the processes: a rank that hangs, stops or dies is found and named, and its node ended.

heartbeat                       each rank's progress, in its node's memory
rank_monitor, watchdog          a rank under watch, and the process beside it
node_monitor, process, stacks   what a watchdog sees: who stands still, in which state, on which line
pace                            how often nodes report, and how long they have to answer
starts, verdict_file, verdict   RUN_DIR/watch: what nodes report to each other, and why a start ended, in one line
stop_signal                     signals that ask to stop
callbacks                       heartbeat and stop signal in the loop: ranks agree on a stop
killed                          what is said of a CPU rank that SIGKILL has ended
exit_code_file                  the exit code, for the batch script
"""
