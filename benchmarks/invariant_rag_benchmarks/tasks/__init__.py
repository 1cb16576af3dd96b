"""The benchmarks, by the shape of their cases, with a page of each: source, data, score."""
