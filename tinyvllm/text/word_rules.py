"""How published models split text into words before BPE, by the names of `tokenizer.ggml.pre`."""

from __future__ import annotations

from tinyvllm.lazy_dataclass import dataclass

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
_SPARK = (
    _DEEPSEEK3[0],
    _DEEPSEEK3[1],
    _DEEPSEEK3[2].replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|", r"[\p{P}\p{S}]+|[\r\n]|"),
    r"\p{N}",
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _O200K.replace("{1,3}", ""),
)
_AFMOE = (  # digits in threes counted from the right: of a run of digits what is left over, then threes
    r"\p{N}+",
    r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)",
    r"\p{N}{1,3}",
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3[2],
)
_NO_HAN = _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
_JAIS2 = (
    _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
)
_EXAONE_MOE = _QWEN2.replace(r"\p{L}+|", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|").replace(r"[\r\n]*|\s*[\r\n]+", r"[\r\n/]?|\s*[\r\n]")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|\n+"


@dataclass(frozen=True)
class WordRules:
    """How text is split into words before BPE: patterns applied one after the other, and other rules that the name implies.

    whole_words: a word that is a token is used whole, regardless of the merges.
    needs_bos: a BOS is added whatever the file says.
    pieces: tokens are pieces of text as sentencepiece has them, with U+2581 for spaces and <0x00> for bytes that are in no piece.
    linear: the time of the patterns grows with the length of the text; else calls are limited in time, as with unknown patterns.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    needs_bos: bool = False
    nfc: bool = False
    pieces: bool = False
    linear: bool = True


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
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), WordRules((_O200K,))),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), WordRules((_LLAMA3,), whole_words=True, add_bos=True)),
    **dict.fromkeys(("glm4", "glm5"), WordRules((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(
        ("olmo", "phi-2", "jais", "gigachat", "mellum", "a.x-4.0", "exaone4", "granite-docling", "trillion"), WordRules((_GPT2,))
    ),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b", "mellum2"), WordRules((r"\p{N}", _GPT2))),
    **dict.fromkeys(("hunyuan", "kormo", "megrez", "grok-2", "solar-open"), WordRules((_QWEN2,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), WordRules(_DEEPSEEK3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), WordRules((_BAILING,))),
    "seed-coder": WordRules((_SEED,)),
    "deepseek-llm": WordRules((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$", _CJK, r"\p{N}+")),
    "chatglm-bpe": WordRules((_LLAMA3,)),
    "minicpm5": WordRules((r"\p{N}{1,3}", _WORDS % r"\p{N}+"), whole_words=True),
    "jais-2": WordRules((_JAIS2,)),
    "ufakzeka": WordRules((_QWEN2.removeprefix(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"),)),
    "laguna": WordRules((_LINES, _QWEN2)),
    "exaone-moe": WordRules((_EXAONE_MOE,)),
    "spark2_5": WordRules(_SPARK),
    "youtu": WordRules(_YOUTU, whole_words=True),
    "kimi-k2": WordRules((rf"\p{{Han}}+|{_NO_HAN}",)),
    "afmoe": WordRules(_AFMOE),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), WordRules((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K), linear=False)),
    "superbpe": WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), linear=False),
    "chameleon": WordRules(_CHAMELEON, add_bos=True),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), WordRules((_BLOOM,))),
    "viking": WordRules((_BLOOM, r"\p{N}")),
    "gemma4": WordRules((_LINES,), add_bos=True, needs_bos=True, pieces=True),
    "sarvam-moe": WordRules((_LINES,), pieces=True),
    "deepseek-coder": WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}
