"""What accompanies training and may end it.

request, stopping           signals that ask to stop, and how all ranks agree on them
heartbeat, beating              each rank's progress, in its node's memory
watched, watchdog           a rank under watch, and the process beside it
node, process, stacks       what a watchdog sees: who stands still, in which state, on which line
pace                        how often nodes tell of themselves, and how long they have to answer
starts, record, verdict     RUN_DIR/watch: what nodes tell each other, and the one line that says why a start ended
gate, health, ...           what is wrong with the numbers: non-finite, spikes, stragglers, replicas, memory
"""
