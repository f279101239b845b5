"""The limits of what one request may contain, in the library and over HTTP; docs/serving-limits.md has them as a table."""

MAX_COUNT = 2**31 - 1  # integers that count tokens or name one: beyond it a histogram, an array or a message overflows
MAX_PRIORITY = 2**31  # and its negative
MAX_DEADLINE_MS = 1e12  # 31 years: what is added to a clock must stay exact
MAX_NAME = 4096  # characters of a key or a cache_salt
MAX_TOKEN_IDS = 2**20  # of one list of ids
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_LOGPROB_ENTRIES = 2**18  # of a request that lists the whole vocabulary: positions times vocabulary; each takes about 300 bytes
MAX_WORDS = 512  # stop strings, bad words
MAX_WORD_LENGTH = 1024  # characters of a stop string or a bad word
MAX_WORDS_LENGTH = 16 * 1024  # characters of all stop strings of a request, or of all its bad words


def brief(value: object) -> str:
    """A value as a message shows it: in one line, shortened if it is long."""
    try:
        return " ".join(f"{value!r:.80}".split())
    except ValueError:  # Python refuses to write an integer of more than 4,300 digits
        return f"{type(value).__name__} with a number of thousands of digits"
