// Arguments of which there is one for each of WORLD ranks: EACH_RANK(u8 *site) is u8 *site0, u8 *site1, and so on.
#pragma once

#ifndef WORLD
#define WORLD 1
#define RANK 0
#endif
#if WORLD == 1
#define EACH_RANK(name) name##0
#elif WORLD == 2
#define EACH_RANK(name) name##0, name##1
#elif WORLD == 4
#define EACH_RANK(name) name##0, name##1, name##2, name##3
#else
#define EACH_RANK(name) name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7
#endif
static_assert(WORLD == 1 || WORLD == 2 || WORLD == 4 || WORLD == 8, "each_rank: WORLD must be 1, 2, 4 or 8");
