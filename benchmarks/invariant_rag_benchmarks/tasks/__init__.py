"""The benchmarks, one module each, with a page of the same name: source, data, score."""
