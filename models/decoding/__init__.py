"""How tokens come out of models: one sampling law, one cache, two decoders."""
