// Policies of a choice of experts that a model does not have: constants that are not defined (RoutingPolicy of the backends).
#pragma once

#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef LOGIT_BIAS
#define LOGIT_BIAS 0
#endif
#ifndef CHOICE_BIAS
#define CHOICE_BIAS 0
#endif
#ifndef EXPERT_GROUPS
#define EXPERT_GROUPS 1
#define KEPT_GROUPS 1
#endif
#ifndef GROUP_SCORES
#define GROUP_SCORES 2
#endif
#ifndef SHARED_GATE
#define SHARED_GATE 0
#endif
#ifndef SHARE_SCALE
#define SHARE_SCALE 1.0f
#endif
