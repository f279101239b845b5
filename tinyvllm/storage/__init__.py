"""Files that can be made again: where they are, whether they are believed, and how they are written.

    folders   which folder is private to this user, and a temporary one where none is
    cache     small files that are verified when they are read and replaced as a whole when they are written
    digests   the content of large files: a digest that is remembered, and sums at the speed of memory

No file of the cache folder is necessary: what is missing, damaged or not ours is built again, and what cannot be written is not kept.
Each reason is logged once (`tinyvllm`).
"""
