"""JSON Schema (drafts 4 to 2020-12) in the keywords that llguidance's grammar enforces.

    read = read_schema(schema)        read.text is the schema that the grammar gets, read.ignored what it does not hold

The grammar enforces some keywords, ignores those that it does not know, and reads some values otherwise than the specification. So every
schema that can be reached from the root is rewritten into the keywords that it enforces: references are resolved (`references`),
patterns are translated (`patterns`), and `not`, `if`, `oneOf` and the dependencies become `anyOf` of alternatives (`negation`,
`apart`). What cannot be said so is an error that names the keyword and its place, or, in a lenient reading, is left out and named.
docs/structured.md has the table.
Standard library only.
"""

from tinyvllm.sampling.schema.keywords import ANNOTATIONS, ENFORCED, FORMATS
from tinyvllm.sampling.schema.read import MAX_CHARS, ReadSchema, read_schema, refuse_constant

__all__ = ["ANNOTATIONS", "ENFORCED", "FORMATS", "MAX_CHARS", "ReadSchema", "read_schema", "refuse_constant"]
