"""Plan-time rules over a resolved config, by what they protect. `miles_rl.preflight` asks them all."""
