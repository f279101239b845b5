"""The layout of a step: buckets, rows in order, slots through the block table, and padding that can do no harm."""

import numpy as np
import pytest

from tinyvllm.batch import NO_SLOT
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.scheduler import Schedule, Scheduled

S, M = 16, 8


def entry(number, length, start, count, num_logits=1):
    sequence = Sequence(number, str(number), [100 * number + i for i in range(length)], SamplingParams())
    sequence.block_table = [10 * number + i for i in range(-(-(start + count) // S))]
    return Scheduled(sequence, start, count, num_logits)


def test_buckets():
    from tinyvllm.runner.prepare import decode_bucket, power_bucket

    assert [decode_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 24, 64]
    assert [power_bucket(n, 16) for n in (1, 16, 17, 300)] == [16, 16, 32, 512]


@pytest.mark.parametrize(
    ("entries", "shape"),
    [
        ([entry(1, 5, 4, 1)], (1, 0, 0, 1)),
        ([entry(i, 5, 4, 1) for i in range(1, 6)], (8, 0, 0, 1)),
        ([entry(1, 20, 0, 20)], (0, 1, 32, 32)),
        ([entry(1, 20, 0, 20), entry(2, 9, 0, 9)], (0, 2, 32, 32)),
        ([entry(1, 5, 4, 1), entry(2, 100, 0, 100), entry(3, 10, 0, 10), entry(4, 9, 0, 9)], (8, 4, 128, 128)),
    ],
    ids=["a decode", "decodes", "a prompt", "prompts", "both"],
)
def test_shapes(entries, shape):
    from tinyvllm.runner.prepare import Shape, shape_of, split

    assert shape_of(*split(Schedule(entries=entries))) == Shape(*shape)


def fill(entries):
    from tinyvllm.runner.prepare import StepInputs, shape_of, split

    singles, chunks = split(Schedule(entries=entries))
    inputs = StepInputs(shape_of(singles, chunks), M, "CPU")
    return inputs, inputs.fill(singles, chunks, S)


def test_decodes():
    inputs, blocks = fill([entry(1, 20, 19, 1), entry(2, 4, 3, 1), entry(3, 40, 39, 1, num_logits=0)])
    assert blocks == 3
    assert inputs.tokens.tolist() == [119, 203, 339, 0] and inputs.positions.tolist() == [19, 3, 39, 0]
    assert inputs.slots.tolist() == [11 * S + 3, 20 * S + 3, 32 * S + 7, NO_SLOT]
    assert inputs.context_lens.tolist() == [20, 4, 40, 0] and inputs.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert inputs.samples.tolist() == [0, 1, 0, 0] and inputs.sample_count.tolist() == [2], "rows of those that sample, then padding"
    assert inputs.rows.tolist() == inputs.decodes.tolist() == [3] and inputs.chunks.tolist() == [4, 0]
    assert inputs.block_tables[2, :3].tolist() == [30, 31, 32]


def test_a_step_with_both():
    inputs, blocks = fill([entry(1, 5, 4, 1), entry(2, 30, 10, 20), entry(3, 40, 0, 12, num_logits=0)])
    assert blocks == 2 and inputs.shape.decodes == 8 and inputs.shape.chunk_tokens == 32
    assert inputs.query_starts.tolist() == [*range(9), 28, 40], "eight padded decodes, then chunks of 20 and 12"
    assert inputs.tokens[8:28].tolist() == list(range(210, 230)) and inputs.positions[8:28].tolist() == list(range(10, 30))
    assert inputs.slots[8:14].tolist() == list(range(20 * S + 10, 20 * S + 16)) and inputs.slots[14] == 21 * S
    assert inputs.tokens[28:40].tolist() == list(range(300, 312))
    assert inputs.slots[1:8].tolist() == [NO_SLOT] * 7
    assert inputs.samples[:2].tolist() == [0, 27] and inputs.sample_count.tolist() == [2], "the decode's row and the last of a chunk"
    assert inputs.rows.tolist() == [40] and inputs.decodes.tolist() == [1] and inputs.chunks.tolist() == [8, 2]


def test_a_second_fill_leaves_nothing_of_the_first():
    inputs, _ = fill([entry(1, 20, 19, 1), entry(2, 4, 3, 1)])
    inputs.fill([entry(3, 4, 3, 1)], [], S)
    assert inputs.slots.tolist() == [30 * S + 3, NO_SLOT] and inputs.context_lens.tolist() == [4, 0]
    assert inputs.block_tables[0, 0] == 30
    inputs.fill([entry(3, 20, 19, 1)], [], S)
    assert inputs.block_tables[0, :2].tolist() == [30, 31], "a table that grew"


def test_the_device_holds_what_the_host_laid_out():
    from tinyvllm.bridge import download

    inputs, blocks = fill([entry(1, 5, 4, 1), entry(2, 30, 10, 20)])
    batch = inputs.batch(blocks)
    for name in ("tokens", "positions", "slots", "query_starts", "context_lens", "block_tables", "rows", "decodes", "chunks",
                 "samples", "sample_count", "shared_prefix_lens"):  # fmt: skip
        np.testing.assert_array_equal(download(getattr(batch, name).contiguous().realize()), getattr(inputs, name))


def test_all_rows_are_sampled_where_all_are_wanted():
    from tinyvllm.runner.prepare import StepInputs, shape_of

    prompt = [entry(1, 20, 0, 20, num_logits=0)]
    inputs = StepInputs(shape_of([], prompt), M, "CPU", all_rows=True)
    inputs.fill([], prompt, S)
    assert inputs.samples.tolist() == list(range(32)) and inputs.sample_count.tolist() == [20]


# --- reused decodes


@pytest.fixture
def uploads(monkeypatch):
    """What is copied to the device, as the number of int32s."""
    from tinyvllm.runner import prepare
    from tinyvllm.runner.arrays import PackedArrays

    seen, upload, upload_parts = [], PackedArrays.upload, prepare.upload_parts

    def spy(arrays):
        seen.append(arrays.host.size)
        upload(arrays)

    def spy_parts(tensor, mirror, parts):
        seen.extend(stop - start for start, stop in parts if stop > start)
        upload_parts(tensor, mirror, parts)

    monkeypatch.setattr(PackedArrays, "upload", spy)
    monkeypatch.setattr(prepare, "upload_parts", spy_parts)
    return seen


def decodes(*positions, batch=None):
    """Decodes 1, 2, ... at these positions, with blocks for them."""
    batch = batch or [entry(b, 100, 0, 1) for b in range(1, len(positions) + 1)]
    for b, (scheduled, position) in enumerate(zip(batch, positions), start=1):
        scheduled.start = position
        scheduled.sequence.block_table[:] = [10 * b + i for i in range(position // S + 1)]
    return batch


def made(batch):
    from tinyvllm.runner.prepare import StepInputs, shape_of

    inputs = StepInputs(shape_of(batch, []), M, "CPU")
    inputs.fill(batch, [], S)
    return inputs


def test_what_the_device_has_advanced_is_not_laid_out_again(uploads):
    batch = decodes(5, 17)
    inputs = made(batch)
    inputs.mark_advanced(1)
    uploads.clear()
    assert inputs.fill(decodes(6, 18, batch=batch), [], S) == 2 and uploads == []
    inputs.mark_advanced(4)
    assert inputs.fill(decodes(10, 22, batch=batch), [], S) == 2 and uploads == []


def test_a_new_block_takes_itself_and_slots_alone(uploads):
    from tinyvllm.bridge import download

    batch = decodes(5, 15)
    inputs = made(batch)
    inputs.mark_advanced(1)
    uploads.clear()
    assert inputs.fill(decodes(6, 16, batch=batch), [], S) == 2
    assert uploads == [1, 1], "no tokens: the device knows them"
    device = inputs.batch(2)
    np.testing.assert_array_equal(download(device.block_tables)[1, :2], [20, 21])
    assert download(device.slots).tolist() == [10 * S + 5, 21 * S], "it was sent to scratch when its blocks were full; the other was not"
    assert download(device.tokens).tolist() == [105, 215], "untouched here"


def test_a_reused_step_looks_only_at_entries_that_have_grown(uploads):
    from tinyvllm.bridge import download

    batch = decodes(5, 15, 30)
    inputs = made(batch)
    inputs.mark_advanced(1)
    assert inputs.ready
    uploads.clear()
    assert inputs.reuse([], S) == 2 and uploads == [] and not inputs.ready
    inputs.mark_advanced(3)
    for scheduled in batch:
        scheduled.start += 4
    batch[1].sequence.block_table.append(77)
    batch[2].sequence.block_table.append(88)
    assert inputs.reuse(batch[1:], S) == 3 and uploads == [1] * 4
    device = inputs.batch(3)
    np.testing.assert_array_equal(download(device.block_tables)[1:3, :3], [[20, 77, 0], [30, 31, 88]])
    assert inputs.slots.tolist()[:3] == [10 * S + 9, 77 * S + 3, 88 * S + 2]
    assert inputs.context_lens.tolist()[:3] == [10, 20, 35]


@pytest.mark.parametrize("why", ["another position", "one has left", "other sequences", "not advanced"])
def test_anything_else_is_laid_out_whole(uploads, why):
    batch = decodes(5, 7)
    inputs = made(batch)
    inputs.mark_advanced(1)
    if why == "not advanced":  # a full fill, after which the device has not advanced
        inputs.fill(decodes(1, 1, batch=batch), [], S)
    uploads.clear()
    fresh = {
        "another position": lambda: decodes(6, 9, batch=batch),
        "one has left": lambda: decodes(6, batch=batch[:1]),
        "other sequences": lambda: decodes(8, 6, batch=batch[::-1]),
        "not advanced": lambda: decodes(6, 8, batch=batch),
    }[why]()
    inputs.fill(fresh, [], S)
    assert len(uploads) == 1 and uploads[0] > 2 * M
    for b, scheduled in enumerate(fresh):
        assert inputs.positions[b] == scheduled.start and inputs.tokens[b] == scheduled.sequence.token_at(scheduled.start)


def test_a_sequence_in_the_memory_of_an_ended_one_is_another(uploads, monkeypatch):
    """Python gives a new object the address, and with it the id, of one that is gone: here, every object has the same."""
    from tinyvllm.runner import prepare

    monkeypatch.setattr(prepare, "id", lambda thing: 1, raising=False)
    batch = decodes(5)
    inputs = made(batch)
    inputs.mark_advanced(1)
    uploads.clear()
    inputs.fill(decodes(6, batch=[entry(2, 100, 0, 1)]), [], S)
    assert len(uploads) == 1 and uploads[0] > M


# --- decodes that share blocks


def sharing(number, shared, *, own=1, num_tokens=1):
    """A decode after the blocks `shared`, at the last slot but one of its own."""
    start = (len(shared) + own) * S - 2
    scheduled = entry(number, start + num_tokens, start, num_tokens)
    scheduled.sequence.block_table = [*shared, *(100 * number + i for i in range(own))]
    return scheduled


def test_decodes_that_share_blocks_stand_side_by_side():
    a, b = [1, 2, 3], [5, 6]
    entries = [sharing(1, a), sharing(2, b), sharing(3, []), sharing(4, a[:2]), sharing(5, b), sharing(6, a), sharing(7, a[:2])]
    inputs, _ = fill(entries)
    ids = (inputs.tokens[:7] // 100).tolist()
    assert ids == [1, 6, 4, 7, 2, 5, 3], "groups in order of their first, and within one the more they share the closer"
    assert inputs.shared_prefix_lens.tolist() == [0, 3 * S, 2 * S, 2 * S, 0, 2 * S, 0, 0]
    assert inputs.samples[:7].tolist() == list(range(7))


def test_the_order_of_the_rows_is_told_and_kept_while_the_schedule_is_the_same():
    """A step is launched before the last one's tokens are known: its rows must be the last one's, whatever tables have become."""
    from tinyvllm.runner.prepare import StepInputs, shape_of

    inputs = StepInputs(shape_of(decodes(1, 1, 1, 1), []), M, "CPU")

    def rows(ids, shared=(1, 2)):
        singles = [sharing(n, shared if n % 2 else []) for n in ids]
        inputs.fill(singles, [], S)
        return [scheduled.sequence.sequence_id for scheduled in singles], inputs.shared_prefix_lens.tolist()

    assert rows([1, 2, 3, 4]) == ([1, 3, 2, 4], [0, 2 * S, 0, 0])
    assert rows([1, 2, 3, 4], shared=()) == ([1, 3, 2, 4], [0] * 4)
    assert rows([2, 3, 4, 5], shared=()) == ([2, 3, 4, 5], [0] * 4)
    assert rows([2, 3, 4, 5]) == ([2, 3, 4, 5], [0] * 4)
    assert rows([4, 3, 2, 1]) == ([4, 1, 3, 2], [0, 0, 2 * S, 0])


def test_only_blocks_that_both_have_filled_are_shared():
    """After a short table are the blocks of the sequence that had its row before."""
    long = [1, 2, 3, 4]
    inputs, _ = fill([sharing(1, long), sharing(2, long), sharing(3, long)])
    assert inputs.shared_prefix_lens.tolist() == [0, 4 * S, 4 * S, 0]
    short = sharing(4, [], own=2)
    short.sequence.block_table = long[:2]
    singles = [short, sharing(2, long), sharing(3, long)]
    inputs.fill(singles, [], S)
    assert singles[0] is short and inputs.block_tables[0, :4].tolist() == long
    assert inputs.shared_prefix_lens.tolist() == [0, S, 4 * S, 0], "its second block lacks a token"


def test_a_decode_next_to_chunks_shares_and_a_chunk_does_not():
    chunk = sharing(3, [1, 2], own=2, num_tokens=2)
    inputs, _ = fill([sharing(1, [1, 2]), chunk, sharing(2, [1, 2])])
    assert inputs.shared_prefix_lens.tolist() == [0, 2 * S] + [0] * 7


def test_without_cascade_the_schedules_order_stays():
    from tinyvllm.runner.prepare import StepInputs, shape_of

    singles = [sharing(1, [1, 2]), sharing(2, []), sharing(3, [1, 2])]
    inputs = StepInputs(shape_of(singles, []), M, "CPU", cascade=False)
    inputs.fill(singles, [], S)
    assert [e.sequence.sequence_id for e in singles] == [1, 2, 3] and not inputs.shared_prefix_lens.any()


def test_what_is_shared_follows_tables_that_change_on_the_way(uploads):
    from tinyvllm.bridge import download

    batch = [sharing(1, [1, 2, 3], own=2), sharing(2, [1, 2, 3], own=2)]
    inputs = made(batch)
    assert inputs.shared_prefix_lens.tolist() == [0, 3 * S]
    inputs.mark_advanced(1)
    for scheduled in batch:
        scheduled.start += 1
    batch[0].sequence.block_table.append(77)
    uploads.clear()
    inputs.fill(batch, [], S)
    assert uploads == [1, 1] and inputs.shared_prefix_lens.tolist() == [0, 3 * S], "a new block of one's own changes nothing in common"
    inputs.mark_advanced(1)
    for scheduled in batch:
        scheduled.start += 1
    batch[1].sequence.block_table = [1, 40, *batch[1].sequence.block_table[2:], 99]  # another list, as after a swap
    uploads.clear()
    inputs.fill(batch, [], S)
    assert uploads == [6, 1, 2] and download(inputs.batch(1).shared_prefix_lens).tolist() == [0, S]


# --- drafts: a sequence has a row for its last token and one for each draft


def drafted(number, length, drafts):
    scheduled = entry(number, length, length - 1, 1 + len(drafts), 1 + len(drafts))
    scheduled.drafts = drafts
    return scheduled


def test_drafts_are_rows_of_decodes():
    from tinyvllm.bridge import download
    from tinyvllm.runner.prepare import Shape

    entries = [entry(1, 5, 4, 1), drafted(2, 31, [7, 8, 9]), entry(3, 20, 19, 1)]
    inputs, blocks = fill(entries)
    assert inputs.shape == Shape(8, 0, 0, 1) and blocks == 3
    assert inputs.decodes.tolist() == inputs.rows.tolist() == inputs.sample_count.tolist() == [6]
    assert inputs.tokens[:6].tolist() == [104, 230, 7, 8, 9, 319]
    assert inputs.positions[:6].tolist() == [4, 30, 31, 32, 33, 19]
    assert inputs.slots[:6].tolist() == [10 * S + 4, 21 * S + 14, 21 * S + 15, 22 * S, 22 * S + 1, 31 * S + 3], "each row its own slot"
    assert inputs.context_lens[:6].tolist() == [5, 31, 32, 33, 34, 20] and (inputs.slots[6:] == NO_SLOT).all()
    assert inputs.samples[:6].tolist() == [*range(6)] and inputs.query_starts[:7].tolist() == [*range(7)]
    for b in (1, 2, 3, 4):
        assert inputs.block_tables[b, :3].tolist() == [20, 21, 22]
    shared = download(inputs.batch(1).shared_prefix_lens)[:6].tolist()
    assert shared == [0, 0, S, S, 2 * S, 0], "full blocks that every row has seen before its own token"


def test_drafts_next_to_chunks():
    from tinyvllm.runner.prepare import Shape

    entries = [drafted(1, 20, [3]), entry(2, 4, 3, 1, num_logits=0), entry(3, 40, 0, 12), entry(4, 30, 0, 20, num_logits=0)]
    inputs, _ = fill(entries)
    assert inputs.shape == Shape(8, 2, 32, 32) and len(inputs.samples) == inputs.shape.sequences
    assert inputs.sample_count.tolist() == [3] and inputs.samples[:3].tolist() == [0, 1, 8 + 11], (
        "two rows of drafts, and the prompt's last"
    )
    assert inputs.tokens[:3].tolist() == [119, 3, 203] and inputs.decodes.tolist() == [3]


@pytest.mark.parametrize(
    ("drafts", "decodes"), [((1,), 2), ((2,), 4), ((8,), 16), ((1, 1), 4), ((3, 8, 0), 16), ((16, 4), 32), ((31, 31, 8), 128)]
)
def test_rows_of_drafts_have_few_shapes(drafts, decodes):
    from tinyvllm.runner.prepare import Shape, shape_of

    entries = [drafted(number, 20, [1] * count) for number, count in enumerate(drafts, start=1)]
    assert shape_of(entries, []) == Shape(decodes, 0, 0, 1)


def test_after_drafts_nothing_is_ready_on_the_device():
    """The device advances decodes by one token; it neither has a step of drafts ready, nor what follows one."""
    from tinyvllm.runner.prepare import StepInputs, shape_of

    plain = [entry(number, 5, 4, 1) for number in (1, 2, 3)]
    inputs = StepInputs(shape_of(plain, []), M, "CPU")
    inputs.fill(plain, [], S)
    inputs.mark_advanced(1)
    later = [entry(1, 6, 5, 1), entry(2, 6, 5, 1), drafted(3, 6, [77])]  # the same sequences one token later, and as many padded rows
    inputs.fill(later, [], S)
    assert not inputs.ready and inputs.tokens.tolist() == [105, 205, 305, 77] and inputs.positions.tolist() == [5, 5, 5, 6]
    inputs.mark_advanced(1)
    inputs.fill([entry(number, 7, 6, 1) for number in (1, 2, 3)], [], S)
    assert inputs.tokens.tolist() == [106, 206, 306, 0] and inputs.positions.tolist() == [6, 6, 6, 0]


def grouped_entry(number, length, start, count):
    """An entry whose rows have a block in each of two groups: 20 and 21 more than ten times its number, then 22 and 23."""
    scheduled = entry(number, length, start, count)
    scheduled.sequence.block_table = [10 * number + 20 + i for i in range(2 * -(-(start + count) // S))]
    return scheduled


def test_each_group_of_layers_has_its_blocks():
    from tinyvllm.bridge import download
    from tinyvllm.runner.prepare import StepInputs, shape_of, split

    entries = [grouped_entry(1, 20, 19, 1), grouped_entry(2, 40, 4, 30)]
    singles, chunks = split(Schedule(entries))
    inputs = StepInputs(shape_of(singles, chunks), M, "CPU", parts=(1, 3))
    assert inputs.fill(singles, chunks, S) == 3, "rows of the longest table"
    batch = inputs.batch(3)
    decodes = batch.num_decodes
    for group, (each, parts) in enumerate(zip((batch, *batch.others), (1, 3), strict=True)):
        first, second, third, fourth, fifth = (parts * (number + group) for number in (30, 32, 40, 42, 44))
        tables, slots = download(each.block_tables), download(each.slots)
        assert tables[0, :2].tolist() == [first, second] and tables[decodes, :3].tolist() == [third, fourth, fifth]
        assert slots[0] == second * S + 3 and set(slots[1:decodes].tolist()) == {NO_SLOT}
        blocks = [third] * 12 + [fourth] * 16 + [fifth] * 2
        assert slots[decodes : decodes + 30].tolist() == [blocks[i] * S + (4 + i) % S for i in range(30)]
        assert (download(each.tokens) == download(batch.tokens)).all() and not each.others or each is batch


def test_a_reused_step_copies_the_new_row_of_each_group(uploads):
    from tinyvllm.bridge import download
    from tinyvllm.runner.prepare import Shape, StepInputs

    scheduled = grouped_entry(1, 60, 31, 1)
    inputs = StepInputs(Shape(1, 0, 0, 1), M, "CPU", parts=(1, 2))
    inputs.fill([scheduled], [], S)
    inputs.mark_advanced(1)
    scheduled.start, scheduled.sequence.block_table = 32, scheduled.sequence.block_table
    scheduled.sequence.block_table += [77, 88]
    uploads.clear()
    assert inputs.reuse([scheduled], S) == 3 and uploads == [1] * 4
    for each, block in zip((inputs.batch(3), *inputs.batch(3).others), (77, 2 * 88), strict=True):
        assert download(each.block_tables)[0, 2] == block and download(each.slots)[0] == block * S


def test_prefixes_are_shared_group_by_group():
    from tinyvllm.runner.prepare import Shape, StepInputs

    ours, theirs = grouped_entry(1, 60, 40, 1), grouped_entry(2, 60, 40, 1)
    theirs.sequence.block_table[0::2] = [*ours.sequence.block_table[0:4:2], 99]  # both full rows in group 0, none in group 1
    inputs = StepInputs(Shape(2, 0, 0, 1), M, "CPU", parts=(1, 1))
    inputs.fill([ours, theirs], [], S)
    first, second = (group.shared.tolist() for group in inputs._of_groups)
    assert first == [0, 2 * S] and second == [0, 0]
