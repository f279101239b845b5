"""`tinyvllm completion SHELL`: a script that completes commands and options, from the parsers of the commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from tinyvllm.cli.arguments import COMMANDS, PARSERS, TWO_WORDS
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class _Word:
    """One option in one of its spellings, as a shell completes it."""

    option: str
    help: str
    takes_value: bool
    repeats: bool
    is_number: bool
    choices: tuple[str, ...]


def run(options: argparse.Namespace) -> int:
    print(_SCRIPTS[options.shell](), end="")
    return 0


def _words(command: str) -> list[_Word]:
    found = []
    for action in PARSERS[command]()._actions:
        for option in action.option_strings:
            takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
            repeats = isinstance(action, argparse._AppendAction) or action.dest == "model"
            choices = tuple(map(str, action.choices or ()))
            found.append(_Word(option, action.help or "", takes_value, repeats, action.type in (int, float), choices))
    return found


def _arguments(command: str) -> list[str]:
    """The values that an argument without dashes may have, and second words of commands; a file, or for show-config a command, if none are
    listed.
    """
    positional = [action for action in PARSERS[command]()._actions if not action.option_strings]
    second = [words[1] for words in TWO_WORDS if words[0] == command]
    return [*second, *(str(choice) for action in positional for choice in action.choices or ())]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- bash, from version 3.2


def _bash() -> str:
    cases = "\n".join(_bash_case(command) for command in COMMANDS)
    return f"""# tinyvllm completion bash; to use it now: eval "$(tinyvllm completion bash)"
_tinyvllm() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} first=${{COMP_WORDS[1]}}
  local command=generate values= at=2 words= files= numbers= arguments=
  local all={_quoted(" ".join(COMMANDS))}
  COMPREPLY=()
  if [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi  # bash separates --option=value at the sign
  if [[ $first != -* ]]; then
    if ((COMP_CWORD == 1)); then values=$all; else command=$first; fi
    if [[ $command == show-config ]]; then
      while ((at < COMP_CWORD)) && [[ ${{COMP_WORDS[at]}} == -* ]]; do ((at++)); done
      if ((at < COMP_CWORD)); then command=${{COMP_WORDS[at]}}; elif [[ $current != -* ]]; then values=$all; fi
      ((at++))
    fi
  fi
  case $command:${{COMP_WORDS[at]}} in
{_bash_two_words()}
  esac
  case $command in
{cases}
    *) return ;;
  esac
  if [[ " $files " == *" $before "* ]]; then return; fi  # the shell completes names of files
  if [[ " $numbers " == *" $before "* ]]; then compopt +o default 2>/dev/null; return; fi
  case $command:$before in
{_bash_choices()}
  esac
  if [[ -z $values ]]; then
    if [[ $current == -* ]]; then values=$words; else values=$arguments; fi
  fi
  COMPREPLY=($(compgen -W "$values" -- "$current"))
}}
complete -o default -F _tinyvllm tinyvllm
"""


def _bash_two_words() -> str:
    """The second word decides where it is whole; before that it is among the replies."""
    cases = [f"    {a}:{b}) if ((at < COMP_CWORD)); then command={_quoted(name)}; fi ;;" for (a, b), name in TWO_WORDS.items()]
    return "\n".join(cases)


def _bash_case(command: str) -> str:
    words = _words(command)
    files = [word.option for word in words if word.takes_value and not word.is_number and not word.choices]
    numbers = [word.option for word in words if word.is_number]
    sets = (("words", [word.option for word in words]), ("files", files), ("numbers", numbers), ("arguments", _arguments(command)))
    return f"    {command}) " + " ".join(f"{name}={_quoted(' '.join(entries))}" for name, entries in sets) + " ;;"


def _bash_choices() -> str:
    every = [(command, word) for command in COMMANDS for word in _words(command) if word.choices]
    cases = [f"    {command}:{word.option}) values={_quoted(' '.join(word.choices))} ;;" for command, word in every]
    return "\n".join(cases) or "    '') ;;"


# --- zsh


def _zsh() -> str:
    cases = "\n".join(_zsh_case(command) for command in COMMANDS)
    described = " ".join(_quoted(f"{command}:{_summary(command)}") for command in COMMANDS)
    return f"""#compdef tinyvllm
# tinyvllm completion zsh; to use it now: eval "$(tinyvllm completion zsh)"
_tinyvllm() {{
  local command=generate at=1
  local -a all
  all=({described})
  if [[ $words[2] != -* ]]; then
    (( CURRENT == 2 )) && {{ _describe command all; return }}
    command=$words[2] at=2
    if [[ $command == show-config ]]; then
      while (( at < CURRENT )) && [[ $words[at+1] == -* ]]; do (( at++ )); done
      if (( at + 1 < CURRENT )); then (( at++ )); command=$words[at]
      elif [[ $words[CURRENT] != -* ]]; then _describe command all; return; else at=2; fi
    fi
  fi
  case $command:$words[at+1] in
{_zsh_two_words()}
  esac
  words=("${{(@)words[at,-1]}}")
  (( CURRENT -= at - 1 ))
  case $command in
{cases}
  esac
}}
if [[ $funcstack[1] == _tinyvllm ]]; then _tinyvllm "$@"; else compdef _tinyvllm tinyvllm; fi
"""


def _zsh_two_words() -> str:
    cases = [f"    {a}:{b}) (( at + 1 < CURRENT )) && {{ command={_quoted(name)}; (( at++ )) }} ;;" for (a, b), name in TWO_WORDS.items()]
    return "\n".join(cases)


def _zsh_case(command: str) -> str:
    specs = " ".join(_quoted(spec) for spec in [*map(_zsh_option, _words(command)), _zsh_argument(command)])
    return f"    {command}) _arguments {specs} ;;"


def _zsh_option(word: _Word) -> str:
    help_text = re.sub(r"([\[\]:\\])", r"\\\1", word.help)
    spec = f"{'*' if word.repeats else ''}{word.option}[{help_text}]"
    if not word.takes_value:
        return spec
    values = f"({' '.join(word.choices)})" if word.choices else " " if word.is_number else "_files"
    return f"{spec}:value:{values}"


def _zsh_argument(command: str) -> str:
    return f"*:value:({' '.join(values)})" if (values := _arguments(command)) else "*:file:_files"


# --- fish


def _fish() -> str:
    head = f"""# tinyvllm completion fish; to use it now: tinyvllm completion fish | source
function __tinyvllm_command
    set -l words (commandline -opc)[2..-1]
    test "$words[1]" = show-config; and set words (string match -v -- '-*' $words[2..-1]); or true
    if test -z "$words[1]"
        contains show-config (commandline -opc); and echo show-config; or echo none
    else if string match -q -- '-*' "$words[1]"
        echo generate
{_fish_two_words()}
    else
        echo $words[1]
    end
end
complete -c tinyvllm -n 'contains (__tinyvllm_command) none show-config' -f -a {_quoted(" ".join(COMMANDS))}
"""
    return head + "".join(f"{line}\n" for command in COMMANDS for line in _fish_lines(command))


def _fish_two_words() -> str:
    tests = [f'    else if test "$words[1] $words[2]" = {_quoted(f"{a} {b}")}\n        echo {name}' for (a, b), name in TWO_WORDS.items()]
    return "\n".join(tests)


def _fish_lines(command: str) -> Iterator[str]:
    names = "none generate" if command == "generate" else command
    condition = _quoted(f"contains (__tinyvllm_command) {names}")
    for word in _words(command):
        spelling = f"-l {word.option[2:]}" if word.option.startswith("--") else f"-s {word.option[1:]}"
        value = " -x" if word.is_number or word.choices else " -r" if word.takes_value else ""
        values = f" -a {_quoted(' '.join(word.choices))}" if word.choices else ""
        yield f"complete -c tinyvllm -n {condition} {spelling}{value}{values} -d {_quoted(word.help)}"
    if _arguments(command):
        yield f"complete -c tinyvllm -n {condition} -f -a {_quoted(' '.join(_arguments(command)))}"


def _summary(command: str) -> str:
    """The first sentence of the command's description."""
    return (PARSERS[command]().description or command).partition(". ")[0].rstrip(".").replace(":", "\\:")


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
