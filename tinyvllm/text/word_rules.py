"""How published models split text into words before BPE, by the names of `tokenizer.ggml.pre`."""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_SPACES = _GPT2.removesuffix(r"|\s+")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")  # marks belong to words
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT_FORM = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  # belongs to the word before it
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_SHORT_FORM}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_SHORT_FORM}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LETTERS = (  # cased letters; written as escapes, since some look like others after normalization
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class WordRules:
    """How text is split into words before BPE: patterns applied one after the other, and other rules that the name implies.

    whole_words: a word that is a token is used whole, regardless of the merges.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


WORD_RULES: dict[str, WordRules] = {
    "default": WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPACES, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": WordRules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_SPACES, "[0-9][0-9][0-9]")),
    "mpt": WordRules((_GPT2_SPACES,)),
    "gpt-2": WordRules((_GPT2,)),
    "llama-bpe": WordRules((_LLAMA3,), whole_words=True, add_bos=True),
    "llama3": WordRules((_LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": WordRules((_LLAMA3,), whole_words=True, add_bos=True),
    "smaug-bpe": WordRules((_LLAMA3,)),
    "dbrx": WordRules((_LLAMA3,)),
    "qwen2": WordRules((_QWEN2,), nfc=True),
    "qwen35": WordRules((_QWEN35,)),
    "deepseek-r1-qwen": WordRules((_QWEN2,)),
    "stablelm2": WordRules((_QWEN2,)),
    "tekken": WordRules((_TEKKEN,), whole_words=True, add_bos=True),
    "smollm": WordRules((r"\p{N}", _GPT2)),
    "starcoder": WordRules((r"\p{N}", _GPT2)),
    "refact": WordRules((r"\p{N}", _GPT2)),
    "command-r": WordRules((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), WordRules((_O200K,))),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), WordRules((_LLAMA3,), whole_words=True, add_bos=True)),
    **dict.fromkeys(("glm4", "glm5"), WordRules((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(("olmo", "phi-2", "jais", "gigachat", "mellum", "a.x-4.0", "exaone4", "granite-docling"), WordRules((_GPT2,))),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b", "mellum2"), WordRules((r"\p{N}", _GPT2))),
    **dict.fromkeys(("hunyuan", "kormo", "megrez", "grok-2", "solar-open"), WordRules((_QWEN2,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), WordRules(_DEEPSEEK3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), WordRules((_BAILING,))),
    "seed-coder": WordRules((_SEED,)),
    "deepseek-llm": WordRules((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$", _CJK, r"\p{N}+")),
    "deepseek-coder": WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}
