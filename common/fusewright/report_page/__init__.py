"""`fusewright report`: one page that shows what became of a model. `document` gathers everything as JSON data, `page` puts it
into a page that needs nothing else."""
