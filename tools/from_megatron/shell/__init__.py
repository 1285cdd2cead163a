"""Scripts, run by bash where they can change nothing.

seal        a filter of system calls: no program, no file written, no connection
calls       system calls that wait for an answer
world       the answers: which files there are; what is written stays in memory
prelude.sh  what stands in bash for programs, cd and exec
run         one run, with its limits
programs    which command starts Megatron-LM, and which another script
reading     one run's programs and what they are answered
rounds      runs with other assumptions: what the command depends on
"""
