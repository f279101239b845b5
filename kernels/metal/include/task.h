// Which rows of x a threadgroup of matvec.metal or norm_gate_up_silu.metal multiplies, and with which matrix: all, or, if EXPERTS is defined, those of
// one task of list_experts.metal. Then the weight is that many matrices, one after the other, a result is of a pair of a row and one of its experts,
// and in place of `rows` there are
//
//   order   [T C] int32        pairs by expert
//   tasks   [1 + 3 N] int32    of at most TOKENS of them; threadgroups after the last task (in y) write nothing
#pragma once
#include "gpu.h"

#ifdef EXPERTS
#define ROWS_ARGUMENTS device const int *order, device const int *tasks,
#define TASK task_of(order, tasks, (int)group.y)
#else
#define ROWS_ARGUMENTS device const int *rows,
#define TASK task_of_all(rows)
#endif

struct Task {
  int expert, count;  // rows; 0 or less for none
  device const int *places;
};
INLINE Task task_of_all(device const int *rows) {
  Task task;
  task.expert = 0, task.count = rows[0], task.places = nullptr;
  return task;
}
INLINE Task task_of(device const int *order, device const int *tasks, int number) {
  Task task;
  task.expert = 0, task.count = 0, task.places = order;
  if (number >= tasks[0]) return task;
  device const int *own = tasks + 1 + 3 * number;
  task.expert = own[0], task.count = own[2] - own[1], task.places = order + own[1];
  return task;
}
INLINE int row_of_out(Task task, int token) {
#ifdef EXPERTS
  return task.places[token];
#else
  return token;
#endif
}
