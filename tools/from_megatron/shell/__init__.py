"""As much of bash as launch scripts need, without running anything: the words of the commands that a script starts.

    syntax         a script as a tree: words with their parts, and commands
    word_reader    from text to words
    parser         from text to commands, one line after the other, as bash reads them; over simple_parser and
                   condition_parser
    variables      values, positional parameters, options; what is set by --set
    patterns       globs
    arithmetic     $(( ))
    parameters     ${NAME...} in all its forms
    expansion      from words to the fields that a command receives
    conditions     [ ], [[ ]] and test
    decisions      branches that cannot be decided: which way is taken, and what it depends on
    status         whether a command succeeded, and how certain that is
    builtins       commands of bash's own that change variables
    text_programs  programs whose output is a function of their words: echo, basename, seq, tr, ...
    interpreter    from commands to what they start; its layers are streams, assignments, starting and branches

What is not known is a character of its own within a text (``tools.from_megatron.unknown``). tests/tools/
test_shell_like_bash.py compares all of it with bash itself: the same words, or a word that is said to be unknown.
"""
