"""The demo: a small model learns a task it half knows. `job` is what it runs, `report` what it shows at the end."""
