"""Expert parallelism: every rank holds some experts, and tokens are sent to the experts that they chose."""
