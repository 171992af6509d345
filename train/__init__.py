"""The app that runs the stages, and distillation itself."""
