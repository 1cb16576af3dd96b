"""One generation: prepare, load the cached prefix, run the model's own `generate` with arranged attention."""
