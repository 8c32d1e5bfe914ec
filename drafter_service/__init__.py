"""The drafter: it turns a session's tokens into pruned candidate trees."""
