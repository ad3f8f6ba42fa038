"""`fusewright report`: a page that shows what happened to a model. `document` collects everything as JSON data, `page` embeds
it in a self-contained page."""
