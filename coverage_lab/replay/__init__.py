"""A model that decodes under a policy, step by step beside its dense self."""
