"""How good a ranking is: right answers (qrels), rankings (runs), measures, tables."""
