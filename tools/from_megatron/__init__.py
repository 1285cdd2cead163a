"""A Megatron-LM command line, launch script or configuration becomes a Triplane recipe; nothing is dropped silently.

sources          what is given, by its kind: a script, Megatron's and Megatron-Bridge's YAML, another program's file
script           a script, run by bash to the commands that start Megatron-LM, with every branch that is open
shell/           bash in a process that can change nothing, and runs with other assumptions
unknown          values that the script does not set, and the marks that stand for them
functional_test  MODEL_ARGS of Megatron-LM's functional tests, as a script
bridge           Megatron-Bridge's YAML as flags
foreign          files of other programs, refused by name
arguments        the command's flags, by the tables in flags*
translate        flags to a draft: tables, and rules_*
missing          everything that is missing at once, with the command to type
convert          from a source to the recipe's text (recipe_text) and what is said about it (summary)
"""
