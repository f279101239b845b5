"""From structured_outputs to masks of allowed tokens: llguidance's parser over our tokenizer's vocabulary. No tensors and no text.

A grammar comes from clients, so its cost is bounded: its length here, the states, items and expressions of its parser by
llguidance's limits. Exceeding them is an error of that request alone. No two sequences share a parser: copies that llguidance makes share
their lexer's states, and one that runs into the limit takes all others with it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm.errors import RequestError
from tinyvllm.host_memory import is_out_of_memory, native_call
from tinyvllm.request import StructuredOutputsParams
from tinyvllm.sampling.grammar_errors import gbnf_error, json_error, lark_error, one_line, regex_error, unfinished_escape
from tinyvllm.sampling.schema import MAX_CHARS as MAX_SCHEMA_CHARS
from tinyvllm.sampling.schema import read_schema, refuse_constant

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARS = 64 * 1024  # characters of a regular expression, of a grammar without the JSON schemas in it, or of all choices
_KEPT = 256  # compiled grammars
# A chain of rules is followed by recursion, without a look at the stack: 3000 rules overflow 8 MiB, 10^4 fit 512. Only touched pages count.
_STACK = 512 << 20
# of memory, as measured: a token of the vocabulary takes 750 bytes while its tree is built; a grammar at the limits 20 MiB; a mask less
_BYTES_PER_TOKEN, _COMPILE_BYTES, _MASK_BYTES = 800, 24 << 20, 256 << 10
# of llguidance; its own defaults let a nested repetition take 1.7 s and 200 MB, and 8000 optional properties 5 s
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
# of Lark's dialect: literals and comments, in which the others mean nothing
_SKIPPED_IN_LARK = re.compile(r"""("(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|\#[^\n]*)|(%json\s*)""")
_REFUSED_IN_LARK = (
    (re.compile(r"&|~(?!\s*\d)"), "the operators & and ~ of terminals are not supported: their cost cannot be bounded"),
    (re.compile(r"\btemperature\s*="), "a rule's temperature is not supported: give SamplingParams one"),
)
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# the one use of llguidance's own keyword that a grammar may make: JSON as Python's json.dumps writes it, without other blanks
AS_DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# between JSON's tokens unless a request says otherwise: compact, as json.dumps writes it, or indented by any of its `indent`. Once at each
# place: a small model that may write any blanks writes line feeds until max_tokens
WHITESPACE = r"[ ]|\n[ \t]{0,20}"
_NO_NUMBERS = 'nrbtf\\"'  # the letters that may follow JSON's backslash, without u
_INSTALL = "structured_outputs: needs llguidance, which is not installed: pip install 'tinyvllm[structured]'"


class GrammarBackend:
    """A tokenizer's vocabulary as grammars see it. Build it once a model: 128k tokens take a second.

    tokens: the bytes that each id adds to a text, b"" where it adds none; those beyond `vocab_size`, the width of the logits, never come.
    special_ids: tokens that are no text. eos_ids: those that end the output, allowed exactly where the grammar may end. encode: ids of
    a part of a text, None where it has none; only forced tokens need it. RequestError if llguidance is missing.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Collection[int],
        eos_ids: Collection[int],
        vocab_size: int,
        encode: Callable[[str], list[int] | None] | None = None,
    ):
        try:
            from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError as error:
            if is_out_of_memory(error):
                raise
            raise RequestError(_INSTALL) from None
        self.vocab_size = vocab_size
        self.eos_ids = tuple(i for i in dict.fromkeys(eos_ids) if i < vocab_size)
        if not self.eos_ids:
            raise RequestError("structured_outputs: this model has no end of sequence token, so no structure could ever end")
        self._builder = _builder_with_a_deep_stack()
        with native_call(vocab_size * _BYTES_PER_TOKEN, "a vocabulary for grammars"):
            vocabulary = _Vocabulary(tokens, {*special_ids, *self.eos_ids}, self.eos_ids[0], vocab_size, encode)
            self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(self.eos_ids))
        self.token_bytes: Sequence[bytes] = vocabulary.tokens
        self.limits = LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar of one request, from the 256 last used or new; from any thread. RequestError names the field and the reason."""
        key = _key(params)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        ignored: list[str] = []
        compiled = CompiledGrammar(self, params, source_of(params, ignored), tuple(ignored))
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, source: str) -> LLMatcher:
        """A parser at the start of a grammar."""
        from llguidance import LLMatcher

        def build() -> LLMatcher:
            with native_call(_COMPILE_BYTES, "a grammar"):
                return LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)

        return self._builder.submit(build).result()


_stack_size = threading.Lock()  # it is one for the process


def _builder_with_a_deep_stack() -> ThreadPoolExecutor:
    """An executor whose only thread runs: one that cannot start it would keep all jobs that it ever gets."""
    builder = ThreadPoolExecutor(1, "tinyvllm-grammar")
    with _stack_size:
        before = threading.stack_size(_STACK)
        try:
            builder.submit(int)
        finally:
            threading.stack_size(before)
    return builder


class CompiledGrammar:
    """A grammar that is known to be sound and to have a first token. Sequences that follow it are `Grammar`s.

    ignored: JSON pointers of the keywords of its schemas that it does not hold.
    """

    def __init__(self, backend: GrammarBackend, params: StructuredOutputsParams, source: str, ignored: tuple[str, ...] = ()):
        self.backend, self.kind, self.source, self.ignored = backend, params.kind, source, ignored
        first = backend.matcher(source)
        self._first: LLMatcher | None = first
        if first.is_error():
            raise RequestError(f"structured_outputs: {_compile_error(params, first.get_error())}")
        scratch = np.empty(-(-backend.vocab_size // 32), dtype=np.int32)  # some bombs go off at the first mask
        with native_call(_COMPILE_BYTES, "a grammar"):
            first.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        if first.is_error() or (first.is_stopped() and not first.is_accepting()):
            raise RequestError(f"structured_outputs: {self.kind}: {_reason(first) or 'nothing matches it'}")

    def matcher(self) -> LLMatcher:
        """A parser of one's own."""
        first, self._first = self._first, None
        return first or self.backend.matcher(self.source)


class Grammar:
    """The state of one sequence in its grammar. Not thread-safe; its methods take microseconds."""

    def __init__(self, compiled: CompiledGrammar):
        self.kind = compiled.kind
        self._matcher = compiled.matcher()
        self._token_bytes = compiled.backend.token_bytes
        self._eos_ids = compiled.backend.eos_ids
        self._surplus = 0  # ends of sequence after the end
        self._bytes = -(-compiled.backend.vocab_size // 32) * 4

    def fill(self, mask_row: np.ndarray) -> None:
        """Write the tokens that may come next: bit t % 32 of word t // 32; a contiguous int32 or uint32 [ceil(V/32)].

        If the grammar has ended, or `error` says why it cannot continue, only the end of sequence is allowed.
        """
        if mask_row.nbytes != self._bytes or not mask_row.flags.c_contiguous:
            raise ValueError(f"grammar: a mask must be contiguous and have {self._bytes // 4} words of 32 bits, got {mask_row.shape}")
        self._matcher.unsafe_compute_mask_ptr(mask_row.ctypes.data, self._bytes)

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed."""
        if self._matcher.is_stopped():  # the parser takes no end of sequence where nothing else could come
            ends = token in self._eos_ids and not self._matcher.is_error()
            self._surplus += ends
            return ends
        return self._matcher.try_consume_tokens([token]) == 1

    def forced(self) -> list[int]:
        """The tokens that must come next whatever the model thinks, in the tokenizer's own spelling; often none.

        Only those whose last byte cannot belong to a longer token. `accept` each that is used.
        """
        if self._matcher.is_stopped():
            return []
        tokens = self._matcher.compute_ff_tokens()
        if not tokens:
            return []
        joined = b"".join(self._token_bytes[token] for token in tokens)
        if not self._matcher.compute_ff_bytes().startswith(joined):
            return []
        return tokens[: self._matcher.validate_tokens(tokens)]

    def rollback(self, n: int) -> None:
        """Take the last n accepted tokens back."""
        surplus = min(n, self._surplus)
        self._surplus -= surplus
        n -= surplus
        if n and not self._matcher.rollback(n):
            raise ValueError(f"grammar: {n} tokens cannot be taken back: {self.error}")

    def ends_after(self, tokens: Sequence[int]) -> bool:
        """Whether it would be `finished` with these tokens, which it must allow."""
        taken = sum(self.accept(token) for token in tokens)
        ended = self.finished
        self.rollback(taken)
        return ended

    @property
    def finished(self) -> bool:
        """Nothing but the end of sequence can come, or has come already."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """The output may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why this grammar cannot continue: it exceeded the limits on states and steps. Only its own request ends."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    @property
    def matcher(self) -> LLMatcher:
        """For `Pool`."""
        return self._matcher


class Pool:
    """Threads that fill masks of several grammars side by side, outside Python's lock."""

    def __init__(self, threads: int):
        from llguidance import LLExecutor

        self._executor = LLExecutor(threads)
        self._matchers: list[tuple[LLMatcher, int]] = []

    def fill(self, jobs: Iterable[tuple[Grammar, int]], mask: np.ndarray) -> None:
        """`Grammar.fill` of row r for each (grammar, r); `mask` int32 [R, ceil(V/32)], contiguous."""
        self._matchers.clear()
        self._matchers.extend((grammar.matcher, row) for grammar, row in jobs)
        if self._matchers:
            R, words = mask.shape
            with native_call(len(self._matchers) * _MASK_BYTES, "the masks of a step"):
                self._executor.unsafe_compute_mask_ptr(self._matchers, mask.ctypes.data, words * 4, R)


def fill_all(grammars: Sequence[Grammar], mask: np.ndarray, pool: Pool) -> None:
    """Row b of `mask`, int32 [B, ceil(V/32)], for grammars[b]."""
    pool.fill(zip(grammars, range(len(grammars)), strict=True), mask)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: set[int], eos: int, vocab_size: int, encode: Callable[[str], list[int] | None] | None
    ):
        self.tokens = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self.eos_token_id = eos
        self._encode = encode
        self._special = special
        self._by_bytes = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, data: bytes | str) -> list[int]:
        """Ids whose bytes, joined, are `data`."""
        text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
        data = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
        ids = self._encode(text) if self._encode is not None else None
        if ids is not None and not self._special.intersection(ids) and b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._by_bytes), None)
            if end is None:
                break  # no token has this byte: llguidance checks what it gets
            ids.append(self._by_bytes[data[at:end]])
            at = end
        return ids


def source_of(params: StructuredOutputsParams, ignored: list[str]) -> str:
    """llguidance's own form of a request's constraint, checked for everything that can be seen without parsing it.

    ignored: gets the places of JSON schemas that the grammar does not hold.
    """
    from llguidance import LLMatcher

    if params.kind in ("json", "json_object"):
        read = read_schema(params.json or {"type": "object"}, params.lenient)
        ignored += read.ignored
        options = _json_options(params, read.named)
        try:
            return LLMatcher.grammar_from_json_schema(read.text, overrides=options)
        except ValueError as error:  # its reader of JSON counts levels
            raise RequestError(f"structured_outputs: json: {one_line(str(error))}: flatten the schema with $defs") from None
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(params, name):
            raise RequestError(f"structured_outputs: {name} belongs to json and json_object, but {params.kind} is given: leave it out")
    if params.regex:
        return LLMatcher.grammar_from_regex(_checked_regex("regex", params.regex))
    if params.choice:
        texts = [json.dumps(text, ensure_ascii=False) for text in params.choice]
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + _checked("choice", " | ".join(texts)) + "\n")
    return LLMatcher.grammar_from_lark(_lark(params.grammar or "", params.lenient, ignored))


def _json_options(params: StructuredOutputsParams, named: bool) -> Any:
    if params.disable_any_whitespace and params.whitespace_pattern is not None:
        raise RequestError("structured_outputs: give disable_any_whitespace or whitespace_pattern, not both")
    options: dict[str, Any] = {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": WHITESPACE}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = _checked_regex("whitespace_pattern", params.whitespace_pattern)
    if named:
        options["json_allowed_escapes"] = _NO_NUMBERS
    return options


def _checked(field: str, text: str, longest: int = MAX_CHARS) -> str:
    if len(text) > longest:
        raise RequestError(f"structured_outputs: {field}: {len(text)} characters, at most {longest} are read: cut it down")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"a lone surrogate {text[error.start]!r} at {error.start}"
        raise RequestError(f"structured_outputs: {field}: {what}: send whole characters") from None
    return text


def _checked_regex(field: str, text: str) -> str:
    if (error := unfinished_escape(_checked(field, text))) is not None:
        raise RequestError(f"structured_outputs: {field}: {error}")
    return text


def _compile_error(params: StructuredOutputsParams, message: str) -> str:
    """The field at fault and what is wrong with it, from what the library says of a grammar."""
    message = message.replace("<non-verbose/>", "")
    if params.regex:
        return f"regex: {regex_error(params.regex, message)}"
    if params.grammar:
        converted = _lark(
            params.grammar, params.lenient, []
        )  # from GBNF, or with JSON schemas on one line: the library's places are not the client's
        same_lines = _GBNF_RULE.search(params.grammar) is None and converted.count("\n") == params.grammar.count("\n")
        return f"grammar: {lark_error(params.grammar if same_lines else '', message)}"
    if params.whitespace_pattern is not None and "regex parse error" in message:
        return f"whitespace_pattern: {regex_error(params.whitespace_pattern, message)}"
    return f"{params.kind}: {json_error(message) if params.json else one_line(message)}"


def _lark(text: str, lenient: bool, ignored: list[str]) -> str:
    """A grammar in Lark's form, checked; one with a rule written `name ::=` is taken for GBNF."""
    if _GBNF_RULE.search(text):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(_checked("grammar", text))
        except RequestError:
            raise
        except RecursionError:
            raise RequestError("structured_outputs: grammar: nested too deeply: split it into rules") from None
        except Exception as error:  # the converter raises whatever its parser stumbles over
            raise RequestError(f"structured_outputs: grammar: not GBNF: {gbnf_error(str(error)) or type(error).__name__}") from None
    _checked("grammar", text, MAX_SCHEMA_CHARS)
    bare, whole, at = [], [], 0
    while (found := _SKIPPED_IN_LARK.search(text, at)) is not None:
        bare.append(text[at : found.start()])
        whole.append(text[at : found.end()])
        at = found.end()
        if found[2]:
            schema, at = _json_in_lark(text, at, lenient, ignored)
            whole.append(schema)
        else:
            bare.append(" " * len(found[0]))
    bare.append(text[at:])
    _checked("grammar", "".join(bare))
    for refused, reason in _REFUSED_IN_LARK:
        if refused.search("".join(bare)):
            raise RequestError(f"structured_outputs: grammar: {reason}")
    return "".join(whole) + text[at:]


def _json_in_lark(text: str, at: int, lenient: bool, ignored: list[str]) -> tuple[str, int]:
    """The JSON schema inside a grammar, checked, and where it ends."""
    try:
        parsed, end = json.JSONDecoder(parse_constant=refuse_constant).raw_decode(text, at)
        options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        if isinstance(parsed, dict) and parsed.get("x-guidance") == AS_DUMPED:
            options = parsed.pop("x-guidance")
        read = read_schema(parsed, lenient)
        ignored += read.ignored
    except RequestError as error:
        raise RequestError(str(error).replace(": json:", ": grammar: %json:", 1)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs: grammar: no JSON after %json ({one_line(str(error))})") from None
    if read.named:
        options["json_allowed_escapes"] = _NO_NUMBERS
    return json.dumps({"x-guidance": options} | json.loads(read.text)), end


def _key(params: StructuredOutputsParams) -> str:
    """What two requests for the same grammar have in common."""
    value = getattr(params, params.kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(id(params))  # compiling says what is wrong
    return json.dumps([params.kind, text, params.disable_any_whitespace, params.whitespace_pattern, params.lenient])


def _reason(matcher: LLMatcher) -> str:
    reason = one_line(matcher.get_error().replace("<non-verbose/>", ""))
    return "nothing matches it" if reason.startswith("NoExtension") else reason
