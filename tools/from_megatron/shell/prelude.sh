# What bash reads before a script (tools/from_megatron/shell/run.py): how programs are replaced. Names begin with __.
unset BASH_ENV
BASH_XTRACEFD=251
PS4=$'\1${BASH_SOURCE[0]:-}\2${LINENO:-}\2${FUNCNAME[0]:-}\2'
PATH=/usr/bin:/bin
FUNCNEST=200
__launcher=0

# One question to whoever reads the script: these words would start a program. The answer is what it prints and how it
# ends, or a script to go on with.
__ask() {
  local -a __said
  builtin printf '%s\0' "$__launcher" "${BASH_LINENO[1]}" "$@" >"/@/ask/$BASHPID"
  builtin mapfile -d '' -t __said <"/@/answer/$BASHPID"
  if [[ ${__said[0]} == input ]]; then
    local __input
    IFS= builtin read -r -d '' __input || :
    builtin printf '%s\0' "$__launcher" "${BASH_LINENO[1]}" "$@" "$__input" >"/@/ask/$BASHPID"
    builtin mapfile -d '' -t __said <"/@/with-input/$BASHPID"
  fi
  if [[ ${__said[0]} == script ]]; then
    __nested "${__said[@]:1}"
    return
  fi
  builtin printf %s "${__said[1]}"
  return "${__said[2]}"
}

# A script that a command starts: of the variables, it has those that are exported; on another machine none.
__nested() (
  __remote=$1 __path=$2 __name=$3 __launcher=$4 __count=$5
  shift 5
  __set=("${@:1:__count}")
  shift "$__count"
  for __each in $(builtin compgen -v); do
    [[ $__kept == *" $__each "* || $__each == __* || ($__remote == 0 && ${!__each@a} == *x*) ]] ||
      unset -v "$__each" 2>/dev/null || :
  done
  for __each in "${__set[@]}"; do builtin export "$__each"; done
  BASH_ARGV0=$__name
  builtin source "$__path" "$@"
)

command_not_found_handle() { __ask "$@"; }
type() { __ask type "$@"; }
hash() { :; }
ulimit() { :; }
command() {
  if [[ $1 == -[vV]* ]]; then __ask command "$@"; else builtin command "$@"; fi
}
exec() {
  (($#)) || return 0
  while [[ $1 == -[acl]* ]]; do
    if [[ $1 == -a ]]; then shift; fi
    shift
  done
  "$@"
  exit
}
grep() {
  local __input
  local -a __files=()
  local __each
  for __each in "$@"; do [[ $__each == -* ]] || __files+=("$__each"); done
  if ((${#__files[@]} > 1)) && [[ -e ${__files[-1]} ]]; then # it reads files, and not what a loop around it reads
    __input=$(/usr/bin/cat -- "${__files[@]:1}" 2>/dev/null)
    if [[ $__input == *_42070*_* || $* == *_42070*_* ]]; then __ask grep "$@"; else /usr/bin/grep "$@"; fi
    return
  fi
  __input=$(/usr/bin/cat)
  if [[ $__input == *_42070*_* || $* == *_42070*_* ]]; then __ask grep "$@"; else /usr/bin/grep "$@" <<<"$__input"; fi
}
# The working folder is a text: the script's folders are on another machine.
pwd() { builtin echo "$PWD"; }
cd() {
  local __to=${*: -1} __part
  local -a __parts
  case $__to in -) __to=${OLDPWD:-$PWD} ;; "") __to=${HOME:-} ;; esac
  [[ $__to == /* || $__to == "$__here"* || $__to == _42070*_* ]] || __to=$PWD/$__to
  IFS=/ builtin read -r -d '' -a __parts < <(builtin printf '%s\0' "$__to") || :
  __to=
  for __part in "${__parts[@]}"; do
    case $__part in "" | .) ;; ..) __to=${__to%/*} ;; *) __to+=/$__part ;; esac
  done
  if [[ $__to == /_42070*_* ]]; then __to=${__to#/}; fi
  OLDPWD=$PWD PWD=${__to:-/}
}
__folders=()
pushd() { __folders+=("$PWD") && cd "$@"; }
popd() {
  ((${#__folders[@]})) || return
  cd "${__folders[-1]}" && unset '__folders[-1]'
}
