"""The commands `bench` and `reproduce` of `invariant-rag`."""
