"""The papers' claims (TOML) and the rules that judge them."""
