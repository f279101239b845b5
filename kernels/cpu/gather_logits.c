// out = the logits of all ranks side by side: the end of a head whose rows are divided among WORLD ranks
//
//   out     [N, V] float32
//   shared  meeting.h: the memory of all ranks; this one writes its logits into the place of all
//   part    [N, COLUMNS] float32   this rank's logits, of the tokens from FIRST on
//   count   [1] int32              how many n there are, 0 to N; further rows of out are unchanged. The same in all ranks
//
// N V <= LOGITS. Only rank 0 has the result: no other rank draws. A row is a unit of work. One place is enough: a rank writes logits again
// after it has met rank 0 in the sums of the next step.
#include "lanes.h"
#include "meeting.h"

static inline void copy_floats(float *to, const float *from, int count);

static void gather_logits(float *out, uint8_t *shared, const float *part, const int32_t *count, const struct thread_team *team) {
  struct meeting *meeting = (struct meeting *)shared;
  const unsigned turn = turn_of(meeting);
  float *logits = (float *)(shared + MEETING_BYTES) + 2l * WORLD * PLACE;
  for (int n = next_unit(team); n < count[0]; n = next_unit(team))
    copy_floats(logits + (long)n * V + FIRST, part + (long)n * COLUMNS, COLUMNS);
  meet(meeting, turn, team);
  for (int n = next_unit(team); RANK == 0 && n < count[0]; n = next_unit(team)) copy_floats(out + (long)n * V, logits + (long)n * V, V);
}

static inline void copy_floats(float *to, const float *from, int count) {
  int i = 0;
  for (; i + 16 <= count; i += 16) v16_store(to + i, v16_load(from + i));
  for (; i < count; i++) to[i] = from[i];
}
