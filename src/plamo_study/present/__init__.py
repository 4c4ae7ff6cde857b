"""What notebooks show: charts, tables, claims, the evidence behind them, and the names of machines."""
